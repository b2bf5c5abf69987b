"""4-bit weights in the layout of AWQ (Lin et al., MLSys 2024, https://arxiv.org/abs/2306.00978), and others in it."""
