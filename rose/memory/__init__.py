"""Slabs shared by the engines of one GPU: who owns them, where they are mapped, who has to give them up."""
