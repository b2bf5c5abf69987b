"""Names of `kvboost_hf.migration`."""

from kvboost_hf.migration import TABLE, Entry, missing, refuse
