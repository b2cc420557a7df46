"""The content of each page as plain data made from an exploration, independent of Dash and plots."""
