"""When two runs are the same but for the order of their sums."""

import numpy as np

# float32 throughout. Sums are taken in another order on another mesh, and Adam divides by the root
# of the second moment: after five steps the loss differs by up to 4e-7 of itself on these meshes.
LOSS_RTOL = 2e-6
# A gradient leaf, relative to its largest entry.
GRADIENT_RTOL = 2e-5


def assert_trains_like(here, alone):
    np.testing.assert_allclose(here.losses, alone.losses, rtol=LOSS_RTOL)
    np.testing.assert_allclose(here.grad_norms, alone.grad_norms, rtol=GRADIENT_RTOL)
    # Adam's first moment after step 1 is 0.1 times the clipped gradient: it stands for gradients.
    for name, value in alone.first_moments.items():
        scale = np.abs(value).max()
        assert scale > 0, name
        np.testing.assert_allclose(
            here.first_moments[name], value, atol=GRADIENT_RTOL * scale, rtol=0, err_msg=name
        )
