"""What brings a model into service, a plain function a step: download, validate, smoke, benchmark.

`glm deploy` and deploy/modal_app.py call them. A volume is a directory that outlives the machine: models/NAME is a
checkpoint, reports/ what the steps found.
"""
