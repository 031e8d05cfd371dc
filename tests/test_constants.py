"""Constants that Python modules repeat are those of the C++ headers."""

from jaxflash import (
    _batch_axes,
    _batch_calls,
    _dense_mask,
    _extension,
    _ffi,
    _kernel_program,
    _passes,
    _printer,
    _ranges,
    _spec,
)


def _kinds_of_masks():
    ranges = _ranges.Ranges(*(None,) * 5)
    of_segments = ranges._replace(query_ids=0, key_ids=0)
    kind_of = _passes.MaskKind.of
    yield "kind_of_band", kind_of(None, is_of_program=False).number
    yield "kind_of_ranges", kind_of(ranges, is_of_program=False).number
    yield "kind_of_segments", kind_of(of_segments, is_of_program=False).number
    yield "kind_of_program_ranges", kind_of(ranges, is_of_program=True).number
    yield "kind_of_program_segments", kind_of(of_segments, is_of_program=True).number


def test_constants_are_those_of_the_headers():
    """By their names in cuda/ffi/module.cc; each of them is repeated somewhere."""
    repeated = (
        ("max_length", _printer.MAX_LENGTH),
        ("max_length", _ranges._FAR),
        ("unlimited", _ffi.UNLIMITED),
        ("max_batch_axes", _batch_axes.MAX_COUNT),
        ("max_captures", _printer.MAX_CAPTURES),
        ("max_capture_rank", _printer.MAX_CAPTURE_RANK),
        ("max_key_sums", _printer.MAX_KEY_SUMS),
        ("max_batch_sum", _kernel_program._MAX_SUMMED_BATCH),
        ("max_single_head_dim", _kernel_program._MAX_SINGLE_HEAD_DIM),
        ("key_terms", _passes._KEY_TERMS["key"]),
        ("distance_terms", _passes._KEY_TERMS["distance"]),
        *_kinds_of_masks(),
        ("least_page_size", _spec.PAGE_SIZES[0]),
        ("most_page_size", _spec.PAGE_SIZES[-1]),
        ("range_block", _ranges.BLOCK),
        ("visit_word_bits", _ranges._WORD),
        ("mask_word_bits", _dense_mask._BITS),
        ("mask_sharers", _dense_mask._SHARERS),
        ("mask_block_bytes", _batch_calls._MASK_BLOCK_BYTES),
        ("segment_bytes", _batch_calls._SEGMENT_BYTES),
        ("walk_bytes", _batch_calls._WALK_BYTES),
        ("workspace_rows", _passes._WORKSPACE_ROWS),
    )
    constants = _extension.constants
    assert {name for name, _ in repeated} == constants.keys()
    for name, value in repeated:
        assert value == constants[name], name
