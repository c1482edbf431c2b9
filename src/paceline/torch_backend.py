"""`paceline.torch_backend`: the backend "paceline" of torch.distributed, registered when this module is
imported.

import paceline.torch_backend
torch.distributed.init_process_group("paceline")
"""

from paceline.comm.torch_process_group.registration import register as register

register()
