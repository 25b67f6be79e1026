"""One host's processes: the pool daemon, the engines and their subscribers are started, watched and
stopped."""
