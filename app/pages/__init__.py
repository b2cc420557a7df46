"""The pages: what is laid out, and which callback connects which control with which view model."""
