from factorial import factorial


def test_factorial():
    assert factorial(3) == 6
    assert factorial(0) == 1
