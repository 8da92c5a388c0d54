from square import square


def test_square():
    assert square(3) == 9
    assert square(-2) == 4
