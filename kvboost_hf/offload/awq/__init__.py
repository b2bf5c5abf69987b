"""Weights of four bits as AWQ checkpoints hold them (Lin et al., MLSys 2024, https://arxiv.org/abs/2306.00978)."""
