"""Names of `kvboost_hf.old_names`."""

from kvboost_hf.old_names import ADAPTED, TABLE, Replacement, missing, refuse
