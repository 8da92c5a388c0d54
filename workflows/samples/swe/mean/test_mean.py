from mean import mean


def test_mean():
    assert mean([1, 2, 3, 6]) == 3
    assert mean([5]) == 5
