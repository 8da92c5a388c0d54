from larger import larger


def test_larger():
    assert larger(2, 9) == 9
    assert larger(9, 2) == 9
