"""Reuse of stored K/V under unmodified generate()."""
