"""Tests for object stores and their users; shipped, so that others can test a store of theirs.

``contract`` is the suite every ``ObjectStore`` passes; ``faulty`` makes any store fail by rule.
"""
