def larger(a, b):
    if a > b:
        return b
    return a
