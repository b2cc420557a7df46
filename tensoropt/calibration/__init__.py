"""From predicted to true times: short real steps of this machine, and what they say of its prices."""
