"""Grading of a model's code by tests that it cannot read, with results that it cannot fake.

The code runs in a sandbox that never contains a test or an expected output. What leaves it is data: standard output, or values of plain types. They are
compared in this process, or, if the tests are Python code, in a second sandbox, in which that code runs without the model's.
"""
