"""Constraints of answers by grammars, which are compiled in processes of their own."""
