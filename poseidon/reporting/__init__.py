"""From tracked runs to figures and pages. Importing it imports no matplotlib."""
