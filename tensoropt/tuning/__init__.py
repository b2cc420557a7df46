"""The choice of a faster plan by measuring the steps of plans on this machine (``tensoropt tune``)."""
