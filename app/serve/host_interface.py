"""Which network interface of this machine bears an address: what gloo and NCCL must be told where there are several."""

import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


def interface_of(address: str) -> str:
    """The interface's name.

    Raises ValueError where no interface bears the IPv4 address.
    """
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        names = [name for _, name in socket.if_nameindex()]
        for name in names:
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            if answer[20:24] == wanted:
                return name
    raise ValueError(f"no network interface of this machine bears the address {address}; there are {', '.join(names)}")
