"""What a model's output means: one class for each task, with its heads, loss, metrics, and statistics over draws."""

from svdcompress.likelihoods._base import Likelihood
from svdcompress.likelihoods._binary import Binary
from svdcompress.likelihoods._classification import Classification
from svdcompress.likelihoods._gaussian import Gaussian
from svdcompress.likelihoods._heads import PAIR_ADVICE, HeadsError, gaussian_heads, is_pair
from svdcompress.likelihoods._loss import Loss, make_loss
from svdcompress.likelihoods._named import TASKS, likelihood_for
from svdcompress.likelihoods._prediction import Prediction
from svdcompress.likelihoods._regression import Regression
from svdcompress.likelihoods._score import score
from svdcompress.likelihoods._statistics import Statistics
from svdcompress.likelihoods._stored import as_stored, from_stored, likelihood_of, own_likelihood, resolve, set_likelihood
from svdcompress.likelihoods._sums import Sums

__all__ = [
    "PAIR_ADVICE",
    "TASKS",
    "Binary",
    "Classification",
    "Gaussian",
    "HeadsError",
    "Likelihood",
    "Loss",
    "Prediction",
    "Regression",
    "Statistics",
    "Sums",
    "as_stored",
    "from_stored",
    "gaussian_heads",
    "is_pair",
    "likelihood_for",
    "likelihood_of",
    "make_loss",
    "own_likelihood",
    "resolve",
    "score",
    "set_likelihood",
]
