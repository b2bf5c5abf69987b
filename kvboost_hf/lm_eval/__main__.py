"""`python -m kvboost_hf.lm_eval`: the command of lm_eval, which then knows the model `kvboost-hf`."""

from lm_eval.__main__ import cli_evaluate

if __name__ == "__main__":
    cli_evaluate()
