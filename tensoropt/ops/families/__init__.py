"""The operator families, one module each; each module describes all of its operators in ``SPECS``."""
