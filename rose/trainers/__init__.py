"""What trainers plug in to use ROSE. Each module needs its own trainer; ROSE itself needs none of them."""
