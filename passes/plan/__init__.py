"""What a model would do on devices that are described in a file: time, memory, and which division suits best.

Nothing here runs a model. devices.py reads the description; held.py says what each device has of a model, costs.py how
long a step takes, predict.py puts both together for a placement; strategies.py tries placements and picks one.
offload.py, disaggregate.py, experts.py and ring.py plan what one placement cannot say; simulate.py is a small
discrete-event simulator for what no formula gives (docs/plan.md).
"""

from llmc.passes.plan.devices import Devices, read_devices
from llmc.passes.plan.predict import Prediction, predict
from llmc.passes.plan.workload import Workload

__all__ = ["Devices", "Prediction", "Workload", "predict", "read_devices"]
