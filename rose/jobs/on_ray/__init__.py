"""Jobs on a Ray cluster: Ray places, starts and watches; the scheduler decides who computes when."""
