"""What ROSE reports, by its figures and tables.

Owns the numbers beside which the simulated ones stand. The simulation does not read them.
"""

FIGURE_1A_ROLLOUT_SHARE = 0.70
"""More than this, in both models."""
FIGURE_1B_P75 = 0.30
"""At most this."""
FIGURE_1C_CACHE = 3.4
FIGURE_1C_FEW_S = 607.0
FIGURE_1C_SCALING = 607 / 435
SECTION_2_2_PREFILL = {"8B": 0.77, "32B": 0.86}
FIGURE_3A_MINUTE, FIGURE_3A_SECOND = 1.7, 4.22
FIGURE_3B_BUSY = 0.189
FIGURE_7_MEAN = {
    ("8B", "GRPO"): 1.31,
    ("32B", "GRPO"): 1.46,
    ("8B", "DAPO"): 1.42,
    ("32B", "DAPO"): 3.31,
    ("8B", "asynchronous"): 1.44,
    ("32B", "asynchronous"): 2.69,
}
"""Throughput over ROLL with GRPO and DAPO, and over AReaL: Figures 7a, 7b, 7c."""
FIGURE_7_MAX = {
    ("8B", "GRPO"): 2.16,
    ("32B", "GRPO"): 1.76,
    ("8B", "DAPO"): 4.82,
    ("32B", "DAPO"): 4.39,
}
FIGURE_7_PART = {"GRPO": "Fig. 7a", "DAPO": "Fig. 7b", "asynchronous": "Fig. 7c"}
FIGURE_8A_SERVERLESS = {"8B": 1.31, "32B": 1.23}
FIGURE_8A_SPOT = {"8B": 1.41, "32B": 1.48}
FIGURE_8A_ROSE_OVER_SPOT = {"8B": 1.20, "32B": 1.26}
FIGURE_8B_SERVERLESS, FIGURE_8B_SPOT, FIGURE_8B_ROSE = 0.261, 0.07, 0.005
TABLE_1_S = {
    "8B": {"ROSE": 496.3, "reload": 651.7, "shared limit": 731.7},
    "32B": {"ROSE": 960.1, "reload": 1161.8, "shared limit": 1301.2},
}
TABLE_1_TTFT_MS = {
    "8B": {"ROSE": 338.1, "reload": 1166.1, "shared limit": 973.2},
    "32B": {"ROSE": 837.5, "reload": 2426.2, "shared limit": 1625.4},
}
TABLE_2_STATIC = {"8B": 776.7 / 469.3, "32B": 1310.5 / 920.4}
TABLE_2_STATIC_TPOT_MS = {"8B": 1488.2, "32B": 7021.1}
TABLE_3 = {"turnwise": {"8B": 1.11, "32B": 1.08}, "paper": {"8B": 1.16, "32B": 1.48}}
FIGURE_14 = {4: 1.26, 8: 1.45, 16: 1.69}
SECTION_6_3_S = {("8B", 200.0): 7.0, ("8B", 1.0): 39.0, ("32B", 200.0): 21.0, ("32B", 1.0): 89.0}
"""Sparse transfer over a link of this many Gbps; Figure 15 has 32B's timeline."""
FIGURE_15_DENSE_S = 96.0
