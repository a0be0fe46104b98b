# SPDX-License-Identifier: Apache-2.0
"""What `polykv bench` and `polykv eval` show and keep their figures with."""
