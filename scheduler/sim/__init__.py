"""Simulation of whole RL jobs on a cluster: the shipped policies place the jobs of a trace."""
