"""Which of several intertwined spirals does a point of the plane belong to?"""
