"""What each page shows, as plain data made from an exploration. Nothing here knows of Dash or of a plot."""
