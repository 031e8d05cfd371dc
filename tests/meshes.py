"""Meshes of the CPU devices that conftest.py asks for."""

import math

import jax
import numpy as np
from jax.sharding import AxisType


def cpu_mesh(kind: AxisType = AxisType.Auto, /, **axes: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices("cpu")[: math.prod(axes.values())])
    kinds = (kind,) * len(axes)
    return jax.sharding.Mesh(devices.reshape(tuple(axes.values())), tuple(axes), axis_types=kinds)
