"""Published folders in the Hugging Face layout.

config_entries      entries of config.json with the types of their readers
rope                rotary settings to options and back
families            entries of each architecture, both directions
class_fields        entries of config.json that transformers' classes read, and their defaults
config              config.json to options and back
side_files          tokenizer, generation settings, chat template
fp8_blocks          FP8 weights with one scale for each block
safetensors_format  header of the safetensors format
weights             safetensors files of a folder as a source, read tensor by tensor
safetensors_writer  safetensors files and their index, written tensor by tensor
"""
