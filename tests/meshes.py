"""Meshes of the CPU devices that conftest.py asks for."""

import math

import jax
import numpy as np


def cpu_mesh(**axes: int) -> jax.sharding.Mesh:
    devices = jax.devices("cpu")[: math.prod(axes.values())]
    return jax.sharding.Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
