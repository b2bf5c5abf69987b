"""Every part of the library with every other one: cells of a matrix, and the page that shows it."""
