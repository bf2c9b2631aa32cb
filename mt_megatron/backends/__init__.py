"""What a device is: ``base`` (the protocol), ``registry`` (finding one), ``cpu``, ``cuda``."""
