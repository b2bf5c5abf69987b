"""stub to be replaced below in this very change"""
