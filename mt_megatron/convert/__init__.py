"""Published weights <-> Megatron's, as tables.

``run`` is one conversion from its ``request`` to the folder it leaves. What it is made of:

* ``table``: whole tensors packed and unpacked by a family's rows; ``tensors``: their shapes and splits.
* ``place``: whole tensors into the parts that a rank's live model holds.
* ``inputs``, ``sources``: what a conversion reads. ``published`` (safetensors, ``safetensors_format``,
  ``fp8_blocks``), ``dist_reader`` (``dist_metadata``, ``archives``), ``torch_reader`` (``torch_args``,
  ``torch_names``), all through ``mapped`` files.
* ``outputs``: what it writes. ``safetensors_writer``, ``dist_writer``, ``torch_writer`` plan files
  (``layout``, ``grouping``, ``megatron_names``), ``output`` writes them so that a kill costs one file each.
* ``hf_config`` (``hf_families``, ``hf_rope``), ``hf_files``: ``config.json`` and the files beside weights.
* ``places``: which folders are read and written, checked without torch.
* ``settings``: the configuration that a conversion works by.
"""
