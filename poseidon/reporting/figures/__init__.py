"""The report's figures. Nothing here is imported before a figure is drawn: all of it needs matplotlib."""
