"""For tests of stores and of what uses them; ships with the package so that others can hold a store to it.

``contract`` is the suite every ``ObjectStore`` passes; ``faulty`` makes any store fail by rule.
"""
