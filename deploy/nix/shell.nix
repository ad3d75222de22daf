# `nix-shell deploy/nix/shell.nix`: everything to build and run glmserve, Terra and Futhark included.
# `--arg withCuda false` for a machine without an NVIDIA GPU.
{ withCuda ? true
, pkgs ? import <nixpkgs> {
    config = {
      allowUnfree = withCuda;
      cudaSupport = withCuda;
    };
  }
}:

let
  cuda = pkgs.cudaPackages_13;
  cudaTools = pkgs.lib.optionals withCuda [
    cuda.cuda_nvcc
    cuda.cuda_cudart
    cuda.cuda_cccl
    cuda.nccl
  ];
  toolchains = pkgs.symlinkJoin {
    name = "glmserve-toolchains";
    paths = [ pkgs.terra pkgs.futhark ];
  };
in
pkgs.mkShell {
  packages = [
    pkgs.python311
    pkgs.gcc
    pkgs.gnumake
    pkgs.cmake
    pkgs.ninja
    toolchains
  ] ++ cudaTools;

  PYTHON = "${pkgs.python311}/bin/python3.11";
  GLM_TOOLCHAINS = "${toolchains}";
  CUDA_HOME = pkgs.lib.optionalString withCuda "${cuda.cuda_nvcc}";
  # Wheels from the registry are linked against the usual paths, and the driver's library is the machine's own.
  LD_LIBRARY_PATH = pkgs.lib.makeLibraryPath (
    [ pkgs.stdenv.cc.cc.lib pkgs.zlib ] ++ pkgs.lib.optionals withCuda [ cuda.nccl ]
  ) + pkgs.lib.optionalString withCuda ":/run/opengl-driver/lib";
}
