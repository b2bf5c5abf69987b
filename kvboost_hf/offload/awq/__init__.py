"""4-bit weights of AWQ checkpoints (Lin et al., MLSys 2024, https://arxiv.org/abs/2306.00978)."""
