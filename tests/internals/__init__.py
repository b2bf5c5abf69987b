"""Every name below the public ones that tests use, one file for each folder of the package.

A name that moves within the package is changed here, and in no test.
"""
