"""Where chunks live besides host memory: on the device, on disk, on other machines."""
