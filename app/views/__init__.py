"""The content of each page, as plain data made from an exploration. Nothing here knows about Dash or a
plot."""
