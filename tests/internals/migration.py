"""Names of `kvboost_hf.migration`."""

from kvboost_hf.migration import TABLE, Replacement, missing, refuse
