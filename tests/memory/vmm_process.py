"""A process that opens another one's slabs: `vmm_process.py SOCKET_FD NUM_FDS SLAB_BYTES [LIBRARY]`.

Takes the descriptors over the socket, maps slab 1 at position 2 without zeroing, prints the bytes found
there, writes 7 over them, and unmaps when a line comes in.
"""

import os
import socket
import sys

from vmm_worlds import World


def main() -> None:
    socket_fd, num_fds, slab_bytes = (int(each) for each in sys.argv[1:4])
    world = World(sys.argv[4] if len(sys.argv) > 4 else None)
    with socket.socket(fileno=socket_fd) as connection:
        _, fds, _, _ = socket.recv_fds(connection, 1, num_fds)
    slabs = world.backend.adopt(fds, slab_bytes)
    for fd in fds:
        os.close(fd)
    range_ = slabs.reserve(4)
    range_.map(2, 1, zero=False)
    print(slabs.num_slabs, *sorted(world.read(range_, 2)), flush=True)
    world.write(range_, 2, 7)
    print("written", flush=True)
    sys.stdin.readline()
    range_.unmap(2)


main()
