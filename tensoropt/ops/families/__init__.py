"""One module per family of operators; each says all of its operators in ``SPECS``."""
