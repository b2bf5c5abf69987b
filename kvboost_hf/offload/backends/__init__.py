"""How the bytes of a layer get into a slot, for each kind of device."""
