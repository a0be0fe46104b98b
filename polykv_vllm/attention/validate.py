# SPDX-License-Identifier: Apache-2.0
def check_vllm_config(vllm_config): pass
