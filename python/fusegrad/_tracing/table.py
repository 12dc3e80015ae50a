"""How each function of torch and each ATen op is traced, or why it is not.

A function that is called with traced values is looked up in FUNCTIONS; one that is not there is run by PyTorch itself,
as the ATen ops that it is made of. These are looked up in OPS; one that is not there is decomposed by PyTorch's own
rules, or refused by its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import calls, composed, elements, folds, moves, reads
from .errors import Refused
from .names import words
from .ops import ELEMENTWISE
from .trace import Handler

__all__ = ["FUNCTIONS", "OPS", "Op", "Refusal"]


@dataclass(frozen=True)
class Refusal:
    """`{}` stands for the name of what is refused."""

    what: str
    instead: str

    def error(self, name: str) -> Refused:
        return Refused(self.what.format(name), self.instead)


@dataclass(frozen=True)
class Op:
    handler: Handler
    read: frozenset[str] | None
    """The arguments that are read: others raise where they are given. None: the handler sees to it."""


_ORDER = Refusal("{} of values that differ from score to score", "compute it outside of the function, and capture it")
_VALUE = Refusal("{} of a value that differs from score to score", "keep it a tensor")
_NUMBER = Refusal(
    "a value that differs from score to score as a Python number",
    "keep it a tensor, such as .long() for int() and x[index] for an element",
)
_BRANCH = Refusal(
    "a branch on a value that differs from score to score", "use torch.where(condition, a, b), and & | ~ on bools"
)
_GRADIENT = Refusal(
    "{} of a value of a score_mod, such as for a hook", "write an autograd.Function whose backward does it"
)

# Names of functions, methods and getters of properties.
_FUNCTIONS: tuple[tuple[str, Handler | Refusal], ...] = (
    ("__getitem__", calls.getitem),
    (
        "__setitem__",
        Refusal("an assignment to elements of a tensor", "compute a new value: torch.where or torch.stack"),
    ),
    ("tensor new_tensor", calls.tensor),
    ("as_tensor", calls.as_tensor),
    ("full_like new_full", calls.with_value),
    ("clamp clip clamp_min clamp_max clamp_ clip_ clamp_min_ clamp_max_", calls.clamp),
    ("matmul __matmul__ __rmatmul__", calls.matmul),
    ("linear", calls.linear),
    ("one_hot", calls.one_hot),
    ("requires_grad.__get__", calls.requires_grad),
    ("__bool__ is_nonzero", _BRANCH),
    ("__index__ __int__ item tolist", _NUMBER),
    (
        "numpy __float__ __complex__ __array__ __contains__ equal allclose data_ptr __dlpack__ __reduce_ex__ "
        "__deepcopy__ nonzero",
        _VALUE,
    ),
    (
        "sort argsort msort topk kthvalue median nanmedian quantile nanquantile mode unique unique_consecutive "
        "cumsum cumprod cummax cummin logcumsumexp",
        _ORDER,
    ),
    (
        "grad_fn grad_fn.__get__ grad.__get__ is_leaf.__get__ output_nr.__get__ requires_grad.__set__ grad.__set__ "
        "data.__set__ register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ backward grad",
        _GRADIENT,
    ),
)

_OPS: tuple[tuple[str, Handler | Refusal, str | None], ...] = (
    (" ".join(ELEMENTWISE), elements.elementwise, None),
    (
        "view _unsafe_view reshape expand permute t transpose select slice unsqueeze squeeze cat stack flip repeat "
        "split split_with_sizes unbind diagonal roll movedim alias clone _reshape_alias tile unfold view_as squeeze_ "
        "repeat_interleave lift_fresh lift lift_fresh_copy _conj resolve_conj contiguous chunk unsafe_split swapaxes",
        moves.move,
        None,
    ),
    (" ".join(folds.FOLDS), folds.fold, "self dim keepdim dtype"),
    ("max min argmax argmin", folds.extreme, "self dim keepdim"),
    ("mm bmm", folds.matrix_product, "self mat2 out_dtype"),
    ("mv", folds.matrix_product, "self vec"),
    ("dot", folds.matrix_product, "self tensor"),
    ("vdot", folds.matrix_product, "self other"),
    ("var std var_mean std_mean", composed.variance, "self dim correction unbiased keepdim"),
    ("norm linalg_vector_norm", composed.norm, "self p ord dim keepdim dtype"),
    ("_cdist_forward _euclidean_dist", composed.distances, "x1 x2 p compute_mode"),
    ("_softmax _log_softmax", composed.softmax, "self dim half_to_float"),
    ("logsumexp", composed.logsumexp, "self dim keepdim"),
    ("bucketize", composed.bucketize, "self boundaries out_int32 right"),
    ("searchsorted", composed.bucketize, "sorted_sequence self out_int32 right side"),
    ("index", reads.index, "self indices"),
    ("index_select", reads.index_select, "self dim index"),
    ("take", reads.take, "self index"),
    ("gather", reads.gather, "self dim index"),
    ("embedding", reads.embedding, "weight indices padding_idx"),
    ("_to_copy", elements.to_copy, "self dtype"),
    ("zeros_like ones_like empty_like", elements.fill, "self dtype"),
    ("new_zeros new_ones new_empty", elements.fill, "self size dtype"),
    ("new_empty_strided", elements.fill, "self size stride dtype"),
    ("full_like", elements.fill, "self fill_value dtype"),
    ("new_full", elements.fill, "self size fill_value dtype"),
    ("_local_scalar_dense", elements.local_scalar, "self"),
    ("sort topk kthvalue median nanmedian mode cumsum cumprod cummax cummin logcumsumexp", _ORDER, None),
)

FUNCTIONS = {name: how for names, how in _FUNCTIONS for name in names.split()}
OPS: dict[str, Op | Refusal] = {
    name: how if isinstance(how, Refusal) else Op(how, None if read is None else words(read))
    for names, how, read in _OPS
    for name in names.split()
}
